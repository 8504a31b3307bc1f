"""The version of this package, which is written here alone: a tree that is not installed has it,
and so has one in front of an installed one.
"""

VERSION = "0.1.0"
