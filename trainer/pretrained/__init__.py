"""Weights from elsewhere and for elsewhere: Hugging Face's files, PEFT's, other runs'.

What a config.json means is read in `conf/config_json.py`. Imports the table of weights.
"""
