"""What the TPU compiler says of a run without a TPU: memory, time, cost.

The programs come from the loops themselves. Imports loops and libtpu's compiler.
"""
