"""What does a feature cost? A run with it against one without."""
