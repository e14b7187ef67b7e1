"""What a run is on disk: its config, record, folder and name; bundles of many runs; loading a trained model."""
