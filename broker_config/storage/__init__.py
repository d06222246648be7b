"""Files and databases that a power cut leaves old or new, never half written."""
