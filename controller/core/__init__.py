"""What every part of the controller may use: errors, events, findings, documents, text, this process.

It knows neither Google nor SSH nor runs. Imports `conf` only.
"""
