"""Stories: measured gains of each technique of this project."""
