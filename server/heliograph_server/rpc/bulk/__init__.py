"""The calls of BulkService."""
