"""A run's weights in use: exported, or loaded with tokenizer and prompts to chat and generate.

Training does not come here. Imports sampler, data and pretrained.
"""
