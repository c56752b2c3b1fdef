"""The daemon of Heliograph: `core` (sessions and their work, no I/O), `services` (gRPC), `app`, `config`."""
