"""The stories of this project, told with measured figures: what each technique is worth."""
