"""Output for people: tables, figures and durations as text."""
