"""The wire format as generated code; `proto/plancompiler/proto/*.proto` is its source.

`scripts/generate_proto` writes the other files of this folder.
"""
