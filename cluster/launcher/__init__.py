"""`hundredfold serve`: start Ray, Serve and HAProxy on one host, and watch them."""
