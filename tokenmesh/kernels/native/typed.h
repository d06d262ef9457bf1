/* Names of the element types that a file included once for each type uses: T, TYPED(name), LOAD,
 * STORE, LOAD_SOME, STORE_SOME. Define TM_BF16 before including it for bfloat16. */
#undef T
#undef TYPED
#undef LOAD
#undef STORE
#undef LOAD_SOME
#undef STORE_SOME
#ifdef TM_BF16
#define T bf16
#define TYPED(name) name##_bf16
#define LOAD load16_bf16
#define STORE store16_bf16
#define LOAD_SOME load_some_bf16
#define STORE_SOME store_some_bf16
#else
#define T float
#define TYPED(name) name##_f32
#define LOAD load16_f32
#define STORE store16_f32
#define LOAD_SOME load_some_f32
#define STORE_SOME store_some_f32
#endif
