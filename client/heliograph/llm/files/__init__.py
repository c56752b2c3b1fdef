"""The files of models and of adapters: headers, tensors, and pairs of thin matrices."""
