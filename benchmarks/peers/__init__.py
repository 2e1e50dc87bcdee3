"""How does it compare with other trainers, and with published returns?"""
