"""Model loading and capture: from a plain module, folder or factory to a functional graph with bindings."""
