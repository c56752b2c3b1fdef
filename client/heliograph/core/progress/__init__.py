"""Progress of long work: callbacks for programs, and bars for people on terminals and in notebooks."""
