"""Import and export of models in the formats of other toolkits.

Names of weights and files in formats other than Hugging Face's occur only in these modules.
"""
