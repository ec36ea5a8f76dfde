"""Emulated cloud: Google's REST APIs and SSH workers on loopback, in one asyncio process.

A separate program (`python -m controller.localcloud`), reached only over HTTP and SSH; nothing else imports it.
"""
