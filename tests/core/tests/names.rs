//! What names and numbers are allowed.

use harvest_fair_core_tests::names::{
    Cost, FairnessKey, NameError, Priority, QueueName, Subject, Weight,
};

fn is_control(error: &NameError) -> bool {
    matches!(error, NameError::Control { .. })
}

#[test]
fn good_names_pass_unchanged() {
    for name in [
        "a",
        "acme/user-7",
        "...",
        "a b",
        "Größe",
        "名前",
        "-",
        "a.b",
    ] {
        assert_eq!(QueueName::parse(name).unwrap().as_bytes(), name.as_bytes());
        assert_eq!(
            FairnessKey::parse(name).unwrap().as_bytes(),
            name.as_bytes()
        );
    }
}

#[test]
fn each_broken_rule_has_its_own_error() {
    for blank in ["", " ", "\u{3000}\t"] {
        assert_eq!(
            FairnessKey::parse(blank),
            Err(NameError::Blank(Subject::Key))
        );
        assert_eq!(
            QueueName::parse(blank),
            Err(NameError::Blank(Subject::Queue))
        );
    }
    for dots in [".", ".."] {
        let error = FairnessKey::parse(dots).unwrap_err();
        assert!(matches!(error, NameError::Dots { .. }), "{error:?}");
    }
    for padded in [" a", "a ", "a\u{a0}", "\u{2003}a"] {
        let error = FairnessKey::parse(padded).unwrap_err();
        assert!(
            matches!(error, NameError::OuterWhitespace { .. }),
            "{error:?}"
        );
    }
    for control in ["a\0b", "a\nb", "\u{7f}", "a\u{85}b", "a\t"] {
        assert!(
            is_control(&FairnessKey::parse(control).unwrap_err()),
            "{control:?}"
        );
        assert!(
            is_control(&QueueName::parse(control).unwrap_err()),
            "{control:?}"
        );
    }
}

#[test]
fn lengths_are_counted_in_bytes() {
    assert!(QueueName::parse("x".repeat(255)).is_ok());
    assert!(QueueName::parse("x".repeat(256)).is_err());
    assert!(FairnessKey::parse("x".repeat(256)).is_ok());
    let error = FairnessKey::parse("ü".repeat(129)).unwrap_err();
    assert_eq!(
        error,
        NameError::TooLong {
            subject: Subject::Key,
            bytes: 258
        }
    );
}

#[test]
fn the_default_key_is_only_taken_from_where_it_is_stored() {
    assert!(FairnessKey::parse("").is_err());
    assert_eq!(FairnessKey::stored(""), FairnessKey::default_key());
}

#[test]
fn numbers_keep_to_their_ranges() {
    assert!(
        Priority::new(0).is_err() && Priority::new(6).is_err() && Priority::new(i64::MIN).is_err()
    );
    assert_eq!(Priority::ALL.map(|p| p.index()), [0, 1, 2, 3, 4]);
    assert_eq!(Priority::default().get(), 3);
    for weight in [0.001, 1.0, 1000.0] {
        assert_eq!(Weight::new(weight).unwrap().get(), weight);
    }
    for weight in [0.0, -1.0, 0.000_999, 1000.1, f64::NAN, f64::INFINITY] {
        assert!(Weight::new(weight).is_err(), "{weight}");
        assert!(Cost::of_claim(-weight.abs()).is_err());
    }
    assert!(Cost::of_claim(0.0).is_err() && Cost::reported(0.0).is_ok());
    assert!(Cost::of_claim(1e-300).is_ok() && Cost::of_claim(1e9).is_ok());
    for cost in [-0.1, 1.1e9, f64::NAN, f64::NEG_INFINITY] {
        assert!(Cost::reported(cost).is_err(), "{cost}");
    }
}

#[test]
fn messages_name_the_value_and_hints_the_mend() {
    let error = Priority::new(9).unwrap_err();
    assert_eq!(error.message(), "priority 9 is out of range");
    assert_eq!(error.hint(), "Use 1 (first) to 5 (last).");
    let error = QueueName::parse(" a").unwrap_err();
    assert_eq!(
        error.message(),
        "queue name \" a\" begins or ends with whitespace"
    );
}
