"""Code that client, master and workers share: messages, their wire form, and gRPC settings."""
