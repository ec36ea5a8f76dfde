"""Google's REST APIs: client, credentials, errors, retries, prices.

Which resources a run has, and what a refusal means for it, is in `controller/resources/`. Imports google-api-python-
client and `controller/core/`.
"""
