"""The dispatch node: it watches a run without influence on it. Loads without torch."""
