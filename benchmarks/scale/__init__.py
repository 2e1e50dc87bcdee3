"""What do more ranks and a network between them cost?"""
