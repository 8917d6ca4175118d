"""The weights of others: their names, their files and their folders, in and out.

These files alone know foreign names; they never train and never ask a model.
"""
