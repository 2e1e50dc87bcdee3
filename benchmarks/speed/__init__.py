"""How fast is it, where does the time go, is it still as fast?"""
