"""Programs simulated on given hardware: seconds and memory of one attention call."""
