//! cargo-pgrx reads the SQL of the extension out of a section of the library that nothing refers to, so the
//! linker must not drop it. cargo-pgrx would pass this flag itself, through RUSTFLAGS, and thereby give every
//! crate a second build beside the one that clippy uses.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,--no-gc-sections");
}
