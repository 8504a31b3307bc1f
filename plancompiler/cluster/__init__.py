"""What client, master and workers share: their messages, the wire form of those, gRPC settings."""
