"""What runs inside a replica, as plain classes; `app.py` wraps them for Ray Serve."""
