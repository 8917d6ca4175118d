"""Every verb of the command line: importing this registers them.

It never knows what a verb does.
"""
