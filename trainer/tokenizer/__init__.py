"""Tokenizers: loaded, trained, converted, and how many bytes a token stands for.

Chat templates are in `conf/chat_template.py`. Imports corpus and the library tokenizers.
"""
