"""The dispatch node: watches a run, which goes on as if nobody did. Loads without torch."""
