"""Laptop side: compose -> plan -> reconcile. Knows Google and SSH, knows no JAX."""
