"""The models of other makers, in and out: their names, their files and their hubs.

Its files never train and never ask a model.
"""
