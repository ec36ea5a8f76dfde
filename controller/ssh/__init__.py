"""Connections to workers: routes, host keys, logins, and the agent's protocol over them.

What is asked of the agent is up to the resources. Imports fabric, paramiko and the agent.
"""
