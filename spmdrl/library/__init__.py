"""What a script or a notebook calls: `spmdrl.load` and `spmdrl.train`. See docs/python.md."""
