"""The rows of the op table, by families; `heliograph_proto.ops` joins them."""
