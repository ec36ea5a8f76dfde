"""What is put into the bucket before a pod is billed: archives, secrets, assets.

What they are made of is read in `controller/inputs/`. Imports that, and the same as the folder above.
"""
