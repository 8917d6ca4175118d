"""Import and export of models in other toolkits' formats.

Only these modules know the names that other formats use for weights and files.
"""
