"""Stands in for the launcher that starts one process per chip; one per worker is enough here."""

import runpy
import sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
