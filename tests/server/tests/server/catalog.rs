//! All that the extension has in a database's catalog, as lines of text that can be compared.

use postgres::Client;

/// One line for each fact about each object of the extension, in order.
const FACTS: &str = r#"
WITH member AS (
    SELECT d.classid, d.objid FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
    WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'harvest_fair'
), relation AS (
    SELECT * FROM pg_class c WHERE EXISTS (SELECT FROM member WHERE classid = 'pg_class'::regclass AND objid = c.oid)
    OR EXISTS (SELECT FROM member JOIN pg_type t ON t.oid = objid WHERE classid = 'pg_type'::regclass AND typrelid = c.oid)
), fact AS (
    SELECT pg_describe_object(classid, objid, 0) || ': comment ' || coalesce(obj_description(objid, classid::regclass::name), 'none')
    FROM member
    UNION ALL
    SELECT 'extension: ' || concat_ws(' ', extnamespace::regnamespace, extrelocatable,
        (SELECT string_agg(pg_describe_object('pg_class'::regclass, c, 0) || ' ' || extcondition[n], ', ' ORDER BY c::regclass::text)
         FROM unnest(extconfig) WITH ORDINALITY u(c, n)))
    FROM pg_extension WHERE extname = 'harvest_fair'
    UNION ALL
    SELECT 'schema: ' || concat_ws(' ', nspname, nspowner::regrole, nspacl)
    FROM pg_namespace JOIN member ON classid = 'pg_namespace'::regclass AND objid = oid
    UNION ALL
    SELECT 'function: ' || concat_ws(' ', pg_get_functiondef(oid), proowner::regrole, proacl)
    FROM pg_proc JOIN member ON classid = 'pg_proc'::regclass AND objid = oid
    UNION ALL
    SELECT 'enum: ' || concat_ws(' ', enumtypid::regtype, row_number() OVER (PARTITION BY enumtypid ORDER BY enumsortorder), enumlabel)
    FROM pg_enum JOIN member ON classid = 'pg_type'::regclass AND objid = enumtypid
    UNION ALL
    SELECT 'relation: ' || concat_ws(' ', oid::regclass, relkind, relpersistence, relowner::regrole, relrowsecurity, reloptions, relacl,
        CASE WHEN relkind = 'v' THEN pg_get_viewdef(oid) END)
    FROM relation WHERE relkind <> 'S'
    UNION ALL
    SELECT 'sequence: ' || concat_ws(' ', oid::regclass, relacl, seqtypid::regtype, seqstart, seqincrement, seqmax, seqmin, seqcache, seqcycle)
    FROM relation JOIN pg_sequence ON seqrelid = oid
    UNION ALL
    SELECT 'column: ' || concat_ws(' ', r.oid::regclass, row_number() OVER (PARTITION BY r.oid ORDER BY attnum), attname,
        format_type(atttypid, atttypmod), CASE WHEN attnotnull THEN 'not null' END,
        CASE WHEN attcollation <> 0 THEN attcollation::regcollation::text END,
        'identity', attidentity, 'generated', attgenerated, pg_get_expr(adbin, adrelid), attacl, col_description(r.oid, attnum))
    FROM relation r JOIN pg_attribute ON attrelid = r.oid AND attnum > 0 AND NOT attisdropped
    LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    UNION ALL
    SELECT 'index: ' || pg_get_indexdef(indexrelid) || coalesce(' comment ' || obj_description(indexrelid, 'pg_class'), '')
    FROM pg_index JOIN relation ON indrelid = oid
    UNION ALL
    SELECT 'constraint: ' || concat_ws(' ', conrelid::regclass, conname, pg_get_constraintdef(c.oid))
    FROM pg_constraint c JOIN relation r ON conrelid = r.oid
    UNION ALL
    SELECT 'trigger: ' || pg_get_triggerdef(t.oid) || ' ' || tgenabled::text || coalesce(' comment ' || obj_description(t.oid, 'pg_trigger'), '')
    FROM pg_trigger t JOIN relation r ON tgrelid = r.oid WHERE NOT tgisinternal
)
SELECT * FROM fact ORDER BY 1"#;

pub fn facts(client: &mut Client) -> Vec<String> {
    let rows = client
        .query(FACTS, &[])
        .unwrap_or_else(|error| panic!("the catalog: {error:?}"));
    rows.iter().map(|row| row.get(0)).collect()
}

/// The facts that only one of two catalogs has: `-` the first, `+` the second.
pub fn difference(first: &[String], second: &[String]) -> Vec<String> {
    let lacks = |facts: &[String], fact: &String| !facts.contains(fact);
    let only_first = first.iter().filter(|fact| lacks(second, fact));
    let only_second = second.iter().filter(|fact| lacks(first, fact));
    only_first
        .map(|fact| format!("- {fact}"))
        .chain(only_second.map(|fact| format!("+ {fact}")))
        .collect()
}
