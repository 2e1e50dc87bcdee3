"""What would a GPU do, and does a real one do it?"""
