"""stable-baselines3 https://stable-baselines3.readthedocs.io/en/master/guide/quickstart.html"""

import gymnasium
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv

model = A2C("MlpPolicy", "CartPole-v1", device="cpu", policy_kwargs={"net_arch": [512, 512]})
model.learn(total_timesteps=50)
env = model.get_env()
observed = env.reset()
for _ in range(10):
    action, state = model.predict(observed, deterministic=True)
    observed, reward, done, info = env.step(action)
ppo = PPO(
    "MlpPolicy",
    DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]),
    n_steps=64,
    n_epochs=1,
    device="cpu",
    policy_kwargs={"net_arch": [512, 512]},
)
ppo.learn(total_timesteps=64)
ppo.save("ppo")
loaded = PPO.load("ppo", device="cpu")
dqn = DQN("MlpPolicy", "CartPole-v1", device="cpu", buffer_size=500, learning_starts=10, policy_kwargs={"net_arch": [512, 512]})
dqn.learn(total_timesteps=60)
sac = SAC("MlpPolicy", "Pendulum-v1", device="cpu", buffer_size=500, learning_starts=10)
sac.learn(total_timesteps=30)
