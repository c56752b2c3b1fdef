"""The backend "remote": devices of a member daemon behind the backend contract. Uses the public
client."""
