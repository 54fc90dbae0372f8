"""Every setting, by section, checked before anything heavy is loaded; TOML files and specs."""
