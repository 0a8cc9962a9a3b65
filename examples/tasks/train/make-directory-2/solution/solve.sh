#!/bin/bash
mkdir town
