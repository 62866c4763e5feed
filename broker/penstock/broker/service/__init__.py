"""The gRPC services that a broker offers."""
