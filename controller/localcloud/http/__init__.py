"""The emulator's HTTP server: routes from Google's discovery documents, validation, errors, uploads and downloads.

What a method does is in `localcloud/apis/`. Imports that, and the log of requests.
"""
