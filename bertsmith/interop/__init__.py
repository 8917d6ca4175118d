"""Import and export of models in the formats of other toolkits.

Only these modules contain the names of weights and files in other formats.
"""
