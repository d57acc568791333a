"""Studies: arms compared over seeds, with settings chosen on dev, by the package's own trainers."""
