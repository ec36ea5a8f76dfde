"""Tests of the emulated cloud."""
