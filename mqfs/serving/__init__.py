"""What every front end uses to serve: accepted connections, socket streams, fairness between users, waiting."""
