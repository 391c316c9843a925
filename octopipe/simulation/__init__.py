"""Programs, their exact times and memory, timelines and bounds."""
